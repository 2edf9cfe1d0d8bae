"""Pages and figures that a person reads, made from records."""
