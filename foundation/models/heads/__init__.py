"""Models that answer in another form than a stock class: vectors, spans, transcripts, two towers."""
