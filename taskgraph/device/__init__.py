"""Arrays that live on a device: what is done with them there."""
