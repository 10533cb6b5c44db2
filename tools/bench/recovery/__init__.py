"""Parts of the study of recovery: trainings that lose ranks and nodes at chosen points."""
