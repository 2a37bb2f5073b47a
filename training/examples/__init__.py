"""What an example is: tokenized text, sentence pairs, masks, chunks of text, pairs of texts, captioned images."""
