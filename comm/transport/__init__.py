"""Communication between replicas: see base.py."""
