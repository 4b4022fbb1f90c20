"""What labels can be, one file for each form: makes such labels, recognizes them and judges answers by them. The table is `table.py`."""
