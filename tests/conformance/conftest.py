collect_ignore = ["tensorflow_api.py", "record.py"]
