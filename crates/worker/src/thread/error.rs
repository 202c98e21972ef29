//! Why a worker could not be started.

use cleave_engine::EngineError;

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The reactor or the store could not be made.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The thread or an eventfd could not be made.
    #[error("cannot start a worker thread: {0}")]
    Thread(#[from] std::io::Error),
}
