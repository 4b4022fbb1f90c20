"""What models read: texts, images and sounds."""
