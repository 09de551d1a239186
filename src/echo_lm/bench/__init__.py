"""`echo-lm bench`: what Echo costs beside its competitors, on the machine at hand."""
