"""Parts of the study of how fewer bits between groups change the loss."""
