//! An independent vhost-user frontend and driver.
