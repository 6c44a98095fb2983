"""Models whose tokens tensor ranks share: without biases, and with biases and one embedding."""

from zsim.model.architecture import GPT, Llama

LLAMA = Llama(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
TIED_GPT = GPT(
    layers=2,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=7,
    tied_embeddings=True,
)
