"""Parts of draw_profile.py: the streams of a GPU in a trace, its figures and its picture."""
