//! The identity of a run's documents, by which a resumed run and other nodes recognize them.

use data::{DocumentSet, Stream};
use serde::{Deserialize, Serialize};

/// The identity of a run's documents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataDigest {
    pub documents: usize,
    pub digest: String,
    /// Parts of the data, of which every node had one: the digest is theirs.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub parts: usize,
    /// Digest of the documents' rows and lengths alone: the same in any number of parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outline: Option<String>,
}

fn one() -> usize {
    1
}

fn is_one(parts: &usize) -> bool {
    *parts == 1
}

impl DataDigest {
    pub(crate) fn of(documents: &DocumentSet) -> DataDigest {
        DataDigest {
            documents: documents.len(),
            digest: documents.digest(),
            parts: documents.corpus.parts(),
            outline: Some(documents.outline()),
        }
    }

    /// The identity of sets that are streamed, of which only the first `documents` are known.
    pub(crate) fn of_stream(stream: &Stream, documents: usize) -> DataDigest {
        DataDigest { documents, digest: stream.digest().to_owned(), parts: 1, outline: None }
    }

    /// True if both are of the same documents, as far as it can be known if they were in another number of parts.
    pub(crate) fn is_of(&self, other: &DataDigest) -> bool {
        match self.parts == other.parts {
            true => (self.documents, &self.digest) == (other.documents, &other.digest),
            false => self.outline.is_some() && self.outline == other.outline,
        }
    }
}
