"""``verify``: is it whole and intact? Every byte that has a checksum, every structure that has a rule."""
