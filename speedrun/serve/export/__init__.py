"""A trained run taken elsewhere: a folder for transformers, or plain weights with a table of names.

Neither needs transformers here: what it reads is written down by hand and checked by the tests
against the real one.
"""
