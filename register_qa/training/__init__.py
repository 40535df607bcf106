"""How the model in the box is made: tokenizer, architecture, packed batches, training, the folder that comes out.

The only part of register_qa that needs more than the standard library.
"""
