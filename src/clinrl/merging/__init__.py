"""Models made of finished versions without training, tensor by tensor."""
