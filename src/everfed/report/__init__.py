"""Tables and figures, made from records only."""
