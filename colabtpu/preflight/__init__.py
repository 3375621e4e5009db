"""The preflight room: compile a Keras step with libtpu, without a TPU."""
