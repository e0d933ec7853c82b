"""Groups of options that several commands share, each with its checks; `training` puts those of training together."""
