"""Pages and figures for people, made from records."""
