"""Other libraries' datasets, with the real libraries; tests skip without them."""
