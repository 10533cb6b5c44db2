"""The command line: this project's parser, and what becomes of Megatron-LM's other flags."""
