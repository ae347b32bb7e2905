"""From the tensors of a model folder to the tensors of a model: files, names, layouts, quantised formats."""
