"""Models whose answer is not that of a stock class: vectors, spans, transcripts, two towers."""
