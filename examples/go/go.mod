module cleave.example/disk

go 1.26.0

require github.com/oapi-codegen/runtime v1.9.0
