"""`submit --on kubernetes`: manifests, the cluster's API, and why pods went. Only `client` loads lightkube."""
