"""The monitoring room: event files, callbacks and inline TensorBoard."""
