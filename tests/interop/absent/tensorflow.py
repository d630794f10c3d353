"""First on the path of processes that run as on a machine without TensorFlow.

Keras and TensorBoard import it whenever they find it, which takes each process 3 seconds.
"""

raise ImportError("TensorFlow is not there")
