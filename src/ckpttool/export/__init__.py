"""What a Hugging Face directory needs beside moved bytes: precision, tied embeddings, the config, side files."""
