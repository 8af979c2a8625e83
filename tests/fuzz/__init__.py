"""Random programmes that compare a model under policies with the plain model, bit by bit."""
