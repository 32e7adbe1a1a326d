"""Language model inference on one device: engine, scheduler, sampling, templates and conversations."""
