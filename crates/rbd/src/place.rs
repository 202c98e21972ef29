//! The location of an image.

use std::path::PathBuf;

/// An image, or a snapshot of one, and how to get into its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePlace {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// One of its snapshots.
    pub snapshot: Option<String>,
    /// The user, without `client.` before it. `None`: admin.
    pub user: Option<String>,
    /// The configuration of the cluster. `None`: where Ceph's programs look for it.
    pub conf: Option<PathBuf>,
}

impl ImagePlace {
    /// Returns the image's name as `rbd` takes it, without the snapshot.
    pub fn image_name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{}/{namespace}/{}", self.pool, self.image),
            None => format!("{}/{}", self.pool, self.image),
        }
    }
}
