"""Files: those that the package writes, untrusted ones that it reads, the Hugging Face Hub, and buckets."""
