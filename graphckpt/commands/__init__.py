"""The commands of ``graphckpt``, a module each: parser, help text, and the code that runs it.

For ``--help`` none of them imports torch or a config, which take seconds: features are imported where a command runs.
"""
