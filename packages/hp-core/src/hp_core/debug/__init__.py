"""Looking at a model that runs on many ranks: what each holds (`describe`), and whether replicas are equal (`fingerprint`)."""
