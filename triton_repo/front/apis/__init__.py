"""Routes of other servers, so that their clients work with this one: OpenAI, Text Embeddings Inference, Hugging Face Inference."""
