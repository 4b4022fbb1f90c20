"""What a Transformer is made of, found in its modules and by running it: blocks, attention, the meaning of weight axes, shapes."""
