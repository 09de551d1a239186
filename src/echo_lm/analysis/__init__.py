"""The paper's mathematics as functions, and instruments for models made of it."""
