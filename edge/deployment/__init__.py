"""Deployment of models: plans are started, their devices are watched, and plans are replaced when devices are lost,
leave or return.
"""
