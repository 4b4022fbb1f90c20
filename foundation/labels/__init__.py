"""What labels can be and what a model answers: one class for each form, in one file each answer."""
