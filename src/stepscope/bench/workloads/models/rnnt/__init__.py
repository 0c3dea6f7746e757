"""RNN-T: a recurrent transducer for speech, as MLPerf's training and inference references define it."""
