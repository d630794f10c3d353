"""The lists of TensorFlow's API pages, and what mirrax has for each line of them."""
