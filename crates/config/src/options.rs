//! The description of a disk and a change of it, from one list of options.

/// Makes [`DiskConfig`](crate::DiskConfig) and [`Change`](crate::Change). The list has four parts: options without which there is
/// no disk, options that a disk is opened with, options for the disks of a node alone, and options that can change while the disk
/// is served. Those of the last part have a default, that of their type, and are written in it without `Given`.
macro_rules! disk_options {
    (
        required { $($(#[$required_attribute:meta])* $required:ident: $Required:ty,)* }
        opened { $($(#[$opened_attribute:meta])* $opened:ident: $Opened:ty,)* }
        node { $($(#[$node_attribute:meta])* $node:ident: $Node:ty,)* }
        live { $($(#[$live_attribute:meta])* $live:ident: $Live:ty,)* }
    ) => {
        /// The description of a disk: the storage that it consists of, and how it is served. A field that is left out has its default.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
        #[serde(default, deny_unknown_fields)]
        #[schemars(transform = DiskConfig::require)]
        pub struct DiskConfig {
            $(
                $(#[$required_attribute])*
                pub $required: $Required,
            )*
            $(
                $(#[$opened_attribute])*
                #[serde(skip_serializing_if = "LeftOut::is_left_out")]
                pub $opened: $Opened,
            )*
            $(
                $(#[$node_attribute])*
                #[serde(skip_serializing_if = "LeftOut::is_left_out")]
                pub $node: $Node,
            )*
            $(
                $(#[$live_attribute])*
                #[arg(default_value_t)]
                #[serde(skip_serializing_if = "LeftOut::is_left_out")]
                pub $live: Given<$Live>,
            )*
        }

        /// The settings that are to change while a disk is served. A field that is left out stays as it is.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
        #[serde(default, deny_unknown_fields)]
        pub struct Change {
            $(
                $(#[$live_attribute])*
                #[schemars(transform = as_named::<<$Live as Setting>::Change>)]
                #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
                pub $live: Option<<$Live as Setting>::Change>,
            )*
            /// How single vrings are waited for, by their numbers; null: as the others. It is not kept.
            #[arg(skip)]
            #[serde(skip_serializing_if = "VringModes::is_empty")]
            pub vrings: VringModes,
        }

        impl DiskConfig {
            /// The fields for the disks of a node alone.
            pub const NODE_FIELDS: &[&str] = &[$(stringify!($node)),*];

            /// Says in the schema which fields there must be. They have no default.
            fn require(schema: &mut Schema) {
                let required = [$(stringify!($required)),*];
                for name in required {
                    let field = schema.pointer_mut(&format!("/properties/{name}"));
                    if let Some(field) = field.and_then(Value::as_object_mut) {
                        field.remove("default");
                    }
                }
                schema.insert("required".to_owned(), json!(required));
            }

            /// The names of the fields that were written.
            pub fn written(&self) -> Vec<&'static str> {
                let fields = [
                    $((stringify!($required), self.$required.is_left_out()),)*
                    $((stringify!($opened), self.$opened.is_left_out()),)*
                    $((stringify!($node), self.$node.is_left_out()),)*
                    $((stringify!($live), self.$live.is_left_out()),)*
                ];
                let written = fields.into_iter().filter(|(_, is_left_out)| !is_left_out);
                written.map(|(name, _)| name).collect()
            }

            /// Returns the names of the fields that cannot change while the disk is served and in which the two mean something
            /// different.
            pub(crate) fn fixed_differences(&self, other: &DiskConfig) -> Vec<&'static str> {
                let fields = [
                    $((stringify!($required), self.$required == other.$required),)*
                    $((stringify!($opened), self.$opened == other.$opened),)*
                    $((stringify!($node), self.$node == other.$node),)*
                ];
                let differing = fields.into_iter().filter(|(_, is_equal)| !is_equal);
                differing.map(|(name, _)| name).collect()
            }

            /// Returns the description with those settings of another that can change while the disk is served.
            pub(crate) fn with_live_settings_of(&self, other: &DiskConfig) -> DiskConfig {
                DiskConfig { $($live: other.$live.clone(),)* ..self.clone() }
            }

            /// Returns the settings after a change, each as if it had been asked for first.
            fn changed(&self, change: &Change) -> Result<DiskConfig, String> {
                let mut next = self.clone();
                $(
                    if let Some(change) = &change.$live {
                        let changed = Setting::changed(&self.$live, change);
                        next.$live = changed.map_err(|why| format!("{}: {why}", stringify!($live)))?;
                    }
                )*
                Ok(next)
            }
        }
    };
}
