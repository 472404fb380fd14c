"""One module a format on disk: ``detect(path)`` gives evidence by names alone, ``open_(path)`` reads the index."""
