"""A TFDS data set of the text that every machine with Python already has."""
