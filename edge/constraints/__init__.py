"""What answers must look like, compiled and followed in processes of their own, which can be killed."""
