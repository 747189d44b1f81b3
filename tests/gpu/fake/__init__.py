"""A GPU that is not there: tensors that have its device and no numbers."""
