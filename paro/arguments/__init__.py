"""The command line: this project's parser, and the treatment of Megatron-LM's other flags."""
