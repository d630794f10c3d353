"""How replica functions are traced, compiled and found again."""
