"""One file for each family of models: what it knows, where its tokens lie, what its blocks cost."""
