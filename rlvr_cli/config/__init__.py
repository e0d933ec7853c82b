"""What can be chosen: a module per command, over groups of options that they share."""
