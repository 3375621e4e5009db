"""The model room: the transformer, its attention and its losses."""
