"""Small pieces that tests share."""
